//! `/auth/namespaces/{namespace}/rules`.

use muster_types::rule::{RuleRecord, RuleTerms};
use reqwest::Method;
use serde_json::json;

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Lists the mapping rules of a namespace by name.
    pub async fn rules(&self, namespace: &str, query: &ListQuery) -> Result<ApiResponse<Vec<RuleRecord>>> {
        self.get_list(path(&["auth", "namespaces", namespace, "rules"])?, query).await
    }

    /// Returns a mapping rule.
    pub async fn rule(&self, namespace: &str, name: &str) -> Result<ApiResponse<RuleRecord>> {
        self.get(path(&["auth", "namespaces", namespace, "rules", name])?).await
    }

    /// Adds a mapping rule.
    pub async fn create_rule(
        &self,
        namespace: &str,
        name: &str,
        terms: &RuleTerms,
    ) -> Result<ApiResponse<RuleRecord>> {
        let mut body = json!(terms);
        body["name"] = name.into();
        self.call(Method::POST, path(&["auth", "namespaces", namespace, "rules"])?, Some(body)).await
    }

    /// Replaces all terms of a mapping rule.
    pub async fn update_rule(
        &self,
        namespace: &str,
        name: &str,
        terms: &RuleTerms,
    ) -> Result<ApiResponse<RuleRecord>> {
        let path = path(&["auth", "namespaces", namespace, "rules", name])?;
        self.call(Method::PUT, path, Some(json!(terms))).await
    }

    /// Deletes a mapping rule.
    pub async fn delete_rule(&self, namespace: &str, name: &str) -> Result<ApiResponse<RuleRecord>> {
        self.delete(path(&["auth", "namespaces", namespace, "rules", name])?).await
    }
}
