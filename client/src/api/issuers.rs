//! `/auth/issuers`.

use muster_types::issuer::{IssuerRecord, IssuerTerms};
use reqwest::Method;
use serde_json::json;

use super::{Answer, Client, Result, path};

impl Client {
    /// The trusted issuers, by name.
    pub async fn issuers(&self) -> Result<Answer<Vec<IssuerRecord>>> {
        self.get(path(&["auth", "issuers"])?).await
    }

    /// One trusted issuer.
    pub async fn issuer(&self, name: &str) -> Result<Answer<IssuerRecord>> {
        self.get(path(&["auth", "issuers", name])?).await
    }

    /// Makes the cluster trust an issuer.
    pub async fn create_issuer(&self, name: &str, terms: &IssuerTerms) -> Result<Answer<IssuerRecord>> {
        let mut body = json!(terms);
        body["name"] = name.into();
        self.call(Method::POST, path(&["auth", "issuers"])?, Some(body)).await
    }

    /// Replaces all terms of an issuer.
    pub async fn update_issuer(&self, name: &str, terms: &IssuerTerms) -> Result<Answer<IssuerRecord>> {
        self.call(Method::PUT, path(&["auth", "issuers", name])?, Some(json!(terms))).await
    }

    /// Makes the cluster trust an issuer no longer.
    pub async fn delete_issuer(&self, name: &str) -> Result<Answer<IssuerRecord>> {
        self.delete(path(&["auth", "issuers", name])?).await
    }
}
