"""Draw figures, and write HTML pages, from the tables of a measurement."""
