"""A release of vLLM, tried by one command: does it have what the patches need, and do the tests of each kind pass?"""
