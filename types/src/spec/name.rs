//! Names of instances, which are also the host names of their guests.

use super::fields::truncate;
use crate::ids::InstanceId;
use crate::{Error, Result};

/// The maximum length of a DNS label.
const MAX_LENGTH: usize = 63;

/// Checks that a name can be the first label of a host name.
pub fn check_instance_name(name: &str) -> Result<()> {
    let why = if name.is_empty() {
        "It is empty"
    } else if name.len() > MAX_LENGTH {
        "It is longer than 63 characters"
    } else if !name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'-') {
        "It may hold letters, digits and hyphens only"
    } else if name.starts_with('-') || name.ends_with('-') {
        "It starts or ends with a hyphen"
    } else if name.parse::<InstanceId>().is_ok() {
        // Lookups would interpret the name as an id.
        "It is a UUID"
    } else {
        return Ok(());
    };
    let name = truncate(name);
    Err(Error::Invalid(format!("instance name {name} is not useable as a DNS and Linux host name. {why}.")))
}
