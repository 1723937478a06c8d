"""What is read and asked: texts and questions, as words and as token ids."""
