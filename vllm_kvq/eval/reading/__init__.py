"""The regime that reads: a text is computed once with the exact cache, then its last tokens read a format's pages."""
