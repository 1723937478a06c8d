"""HumanEval: its problems, a sandbox for what models write, and the run."""
