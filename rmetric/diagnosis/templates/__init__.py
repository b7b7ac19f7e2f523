"""From lines to events: masks, cached facts per form of line, and Drain."""
