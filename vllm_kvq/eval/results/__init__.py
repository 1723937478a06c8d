"""What was found: rows, figures with their intervals, claims, tables and plots."""
