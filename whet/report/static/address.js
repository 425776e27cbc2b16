"use strict";
// The token is in a cookie now: remove it from the address, which people copy and share.
const address = new URL(location.href);
address.searchParams.delete("token");
history.replaceState(null, "", address);
