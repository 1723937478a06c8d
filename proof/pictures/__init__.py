"""The documents' pictures, each drawn from recorded results or from the formats; and pages as a browser shows them."""
