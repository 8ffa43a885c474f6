"""Pages: self-contained HTML, one look."""
