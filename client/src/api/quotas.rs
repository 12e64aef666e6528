//! `/auth/namespaces/{namespace}/quotas`.

use muster_types::quota::{QuotaName, QuotaRecord};
use reqwest::Method;
use serde_json::json;

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Lists the quotas of a namespace, with limits and usage.
    pub async fn quotas(&self, namespace: &str, query: &ListQuery) -> Result<ApiResponse<Vec<QuotaRecord>>> {
        self.get_list(path(&["auth", "namespaces", namespace, "quotas"])?, query).await
    }

    /// Sets a limit of a namespace; 0 means unlimited.
    pub async fn set_quota(
        &self,
        namespace: &str,
        name: QuotaName,
        limit: u64,
    ) -> Result<ApiResponse<QuotaRecord>> {
        let path = path(&["auth", "namespaces", namespace, "quotas", name.as_str()])?;
        self.call(Method::PUT, path, Some(json!({ "limit": limit }))).await
    }

    /// Removes a limit of a namespace, so that the default applies.
    pub async fn reset_quota(&self, namespace: &str, name: QuotaName) -> Result<ApiResponse<QuotaRecord>> {
        self.delete(path(&["auth", "namespaces", namespace, "quotas", name.as_str()])?).await
    }
}
