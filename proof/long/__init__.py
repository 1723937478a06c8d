"""Long prompts of real text on a real pretrained model: under `lossless`, answers are plain vLLM's, token by token.

prompts.py   the prompts, and the traces that they become
main.py      the command
"""
