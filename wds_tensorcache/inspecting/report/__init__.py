"""A page that shows a cache: an offline file or a server."""
