"""Speed, each number with the command that prints it."""
