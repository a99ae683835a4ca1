"""FILES: JSON written whole or not at all, lines appended by one writer, output paths checked first. Knows no model."""
