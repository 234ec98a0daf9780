"""Files that need no part of this package, from a cache; `importers.generic.exported` reads them back."""
