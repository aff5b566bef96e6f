"""What a request of the API says, and what it is told: bodies, errors, chats as prompts by DeepSeek's own encoder."""
