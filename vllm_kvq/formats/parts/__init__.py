"""What methods are made of: fields, codes and the arithmetic that they share."""
