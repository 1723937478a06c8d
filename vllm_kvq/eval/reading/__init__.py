"""The reading regime: a text is computed once with the exact cache, then its last tokens read a format's pages."""
