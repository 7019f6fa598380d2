"""See it: the web application, comparison and verdicts over run directories and collections. Reads files alone."""
