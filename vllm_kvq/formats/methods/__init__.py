"""The methods: one file each, which begins with its byte layout."""
