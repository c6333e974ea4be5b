"""Reports of records: `render.render` returns any supported record as text, JSON or a self-contained HTML page."""
