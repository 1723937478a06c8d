"""Results: rows, figures with their intervals, claims, tables and plots."""
