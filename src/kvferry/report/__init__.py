"""Figures and pages made from results; nothing is computed again here."""
