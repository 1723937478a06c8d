"""Texts and questions, as words and as token ids."""
