// Shows the document of the server that served this page, and nothing from anywhere else.
SwaggerUIBundle({ url: new URL("../openapi.json", document.baseURI).href, dom_id: "#api", deepLinking: true, validatorUrl: null });
