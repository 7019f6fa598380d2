"""The APIs that agents speak to the gateway, one file each: parse a request into a neutral call, render its answer."""
