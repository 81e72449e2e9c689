// Where the page begins.

import * as announce from "./announce.js";
import * as keys from "./keys.js";
import * as orders from "./orders.js";
import * as router from "./router.js";
import * as search from "./search.js";
import * as store from "./store.js";
import * as theme from "./theme.js";

theme.start();
store.start();
router.start();
search.start();
keys.start();
orders.start();
announce.start();
