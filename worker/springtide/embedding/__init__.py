"""Embedding tables: modules whose rows lie on parameter servers, or in this process when it trains alone."""
