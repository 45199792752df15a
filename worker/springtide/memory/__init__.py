"""How much memory the script's model takes, whether this process has it, and what it keeps."""
