"""Research that uses the package: claims of papers, audits, landscapes and tables."""
