//! `/auth/issuers`.

use muster_types::issuer::{IssuerRecord, IssuerTerms};
use reqwest::Method;
use serde_json::json;

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Lists the trusted issuers by name.
    pub async fn issuers(&self, query: &ListQuery) -> Result<ApiResponse<Vec<IssuerRecord>>> {
        self.get_list(path(&["auth", "issuers"])?, query).await
    }

    /// Returns a trusted issuer.
    pub async fn issuer(&self, name: &str) -> Result<ApiResponse<IssuerRecord>> {
        self.get(path(&["auth", "issuers", name])?).await
    }

    /// Adds a trusted issuer.
    pub async fn create_issuer(&self, name: &str, terms: &IssuerTerms) -> Result<ApiResponse<IssuerRecord>> {
        let mut body = json!(terms);
        body["name"] = name.into();
        self.call(Method::POST, path(&["auth", "issuers"])?, Some(body)).await
    }

    /// Replaces all terms of an issuer.
    pub async fn update_issuer(&self, name: &str, terms: &IssuerTerms) -> Result<ApiResponse<IssuerRecord>> {
        self.call(Method::PUT, path(&["auth", "issuers", name])?, Some(json!(terms))).await
    }

    /// Removes a trusted issuer.
    pub async fn delete_issuer(&self, name: &str) -> Result<ApiResponse<IssuerRecord>> {
        self.delete(path(&["auth", "issuers", name])?).await
    }
}
