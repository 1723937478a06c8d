"""The documents' pictures: each is drawn from recorded results or from the formats themselves."""
