mod key_fetching;
mod verification;

use super::*;
