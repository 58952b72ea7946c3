"""tailorfl: personalized federated learning."""
