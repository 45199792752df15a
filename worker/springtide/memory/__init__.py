"""How much memory the script's model takes, and whether this process has it."""
