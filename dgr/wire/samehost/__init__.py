"""Links between processes of one host: an AF_UNIX socket, and sealed memory that both sides have mapped."""
