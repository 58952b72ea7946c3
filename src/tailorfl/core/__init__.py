"""What the author of a method reads: methods, clients, messages and the server's tools."""
