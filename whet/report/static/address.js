"use strict";
// The token is in a cookie now: take it out of the address, which people copy and show.
const address = new URL(location.href);
address.searchParams.delete("token");
history.replaceState(null, "", address);
