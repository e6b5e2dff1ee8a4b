"""From the arithmetic on a napkin to what was measured, cause by cause."""
