"""The command line: one thin file a command; each is imported only when it runs."""
