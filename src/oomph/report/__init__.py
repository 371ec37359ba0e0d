"""One result, shown in the terminal, as Markdown, as SVG or as JSON."""
