"""Models as folders that need no tailorfl."""
