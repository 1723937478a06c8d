"""A command's results as one HTML file, `report.html`: tables, plots, and how they were made. It loads nothing."""
