"""Flexpress where others call attention: one module for each library. Each imports its library, so none is imported from here."""
