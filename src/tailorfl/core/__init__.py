"""The interface for authors of methods: methods, clients, messages and the server's tools."""
