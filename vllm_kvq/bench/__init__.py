"""Speed measurements; each number in the docs comes with the command that prints it."""
