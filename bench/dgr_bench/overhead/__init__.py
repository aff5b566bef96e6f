"""What dgr costs on top of llama.cpp, and a hop on top of its bytes."""
