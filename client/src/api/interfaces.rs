//! `/interfaces`.

use muster_types::interface::InterfaceRecord;
use reqwest::Method;

use super::client::Client;
use super::error::Result;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Returns an interface.
    pub async fn interface(&self, id: &str) -> Result<ApiResponse<InterfaceRecord>> {
        self.get(path(&["interfaces", id])?).await
    }

    /// Assigns a floating address to an interface.
    pub async fn float_interface(&self, id: &str) -> Result<ApiResponse<()>> {
        self.call(Method::POST, path(&["interfaces", id, "float"])?, None).await
    }

    /// Removes the floating address of an interface.
    pub async fn defloat_interface(&self, id: &str) -> Result<ApiResponse<()>> {
        self.call(Method::POST, path(&["interfaces", id, "defloat"])?, None).await
    }
}
