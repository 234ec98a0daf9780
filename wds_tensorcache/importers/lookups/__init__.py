"""Files that tell which items belong together: databases, lists of images, and paths of media files."""
