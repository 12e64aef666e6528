//! Names of instances, which their guests have as host names.

use super::fields::cut;
use crate::ids::InstanceId;
use crate::{Error, Result};

/// The longest label of a DNS name.
const LONGEST: usize = 63;

/// Refuses what cannot be the first label of a host's name.
pub fn check_instance_name(name: &str) -> Result<()> {
    let why = if name.is_empty() {
        "It is empty"
    } else if name.len() > LONGEST {
        "It is longer than 63 characters"
    } else if !name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'-') {
        "It may hold letters, digits and hyphens only"
    } else if name.starts_with('-') || name.ends_with('-') {
        "It starts or ends with a hyphen"
    } else if name.parse::<InstanceId>().is_ok() {
        // It would never be found: what looks like an id is looked up as one.
        "It is a UUID"
    } else {
        return Ok(());
    };
    let name = cut(name);
    Err(Error::Invalid(format!("instance name {name} is not useable as a DNS and Linux host name. {why}.")))
}
