"""The documents' pictures, each drawn from recorded results or from the formats."""
