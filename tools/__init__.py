"""Programs beside the product, with requirements of their own (``tools/requirements.txt``). Nothing imports them."""
