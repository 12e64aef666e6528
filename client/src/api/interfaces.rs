//! `/interfaces`.

use muster_types::interface::InterfaceRecord;
use reqwest::Method;

use super::{Answer, Client, Result, path};

impl Client {
    /// One interface.
    pub async fn interface(&self, id: &str) -> Result<Answer<InterfaceRecord>> {
        self.get(path(&["interfaces", id])?).await
    }

    /// Gives an interface a floating address.
    pub async fn float_interface(&self, id: &str) -> Result<Answer<()>> {
        self.call(Method::POST, path(&["interfaces", id, "float"])?, None).await
    }

    /// Takes the floating address of an interface back.
    pub async fn defloat_interface(&self, id: &str) -> Result<Answer<()>> {
        self.call(Method::POST, path(&["interfaces", id, "defloat"])?, None).await
    }
}
